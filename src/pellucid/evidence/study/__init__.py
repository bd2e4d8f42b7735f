"""Studies: the same question asked of many set-ups, with every answer kept as soon as it is known.

`kernel` (what all studies share), `setups` (samplers as cells), `subject` (what makes the images). A study is a file
with its config and cells, beside its figures and its report: `samplers`, `samplers_results`, `samplers_verdict`,
`samplers_report`; `guidance`, `guidance_report`; `interaction`, `interaction_report`; `oracle`,
`oracle_report`, `oracle_orders`; `schedules`. The rest is this room's own.
"""
