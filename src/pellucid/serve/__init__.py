"""Serving: an engine process that steps many requests in one batch, and an API process in front of it.

`engine` runs jobs through encode → denoise → decode, with lanes of step batches; `worker` is the process that holds it,
and `supervisor` starts, watches and replaces that process. `admission` decides what is accepted; `api` is the HTTP
interface with `schemas` and `errors`; `metrics` counts; `settings` reads what the server is started with.
"""
