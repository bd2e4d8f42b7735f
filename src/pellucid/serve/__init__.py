"""Serving: an engine process that steps many requests in one batch, and an API process in front of it.

`engine` runs jobs through encode → denoise → decode, with lanes of step batches; `worker` is the process that holds it,
and `supervisor` starts, watches and replaces that process; `ray` runs engines as replicas on several machines.
`admission` decides what is accepted; `api` is the HTTP interface with `schemas` and `errors`; `metrics` counts;
`settings` reads what the server is started with, and `rollout` brings new versions of models in. `client`, `bench` and
`bench_report` are the other side: they load a server and say what it did.
"""
