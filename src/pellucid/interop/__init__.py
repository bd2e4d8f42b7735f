"""Other people's formats: models, adapters, tokenizers and schedulers, and pipelines that already run.

Models: `source` (a name, file or folder → components), `hub`, `folder`, `single_file`, `save`, `local_models`; what
they are made of: `components`, `family`, `weights`, `tokenizer`. Adapters: `lora_file`. Schedulers: `scheduler` (the
three-call API), `diffusers_config` and `diffusers_export` (config ↔ reading), `diffusers_plan` (reading → plan),
`diffusers_classes` (diffusers' defaults). Live pipelines: `wrap`, `wrap_branches`, `wrap_proxies`. k-diffusion's
convention: `kdiffusion`. Files that are whole or absent, and locks on them: `atomic_files`, `lock`.
Everything else here (`lora_keys`, `lora_parts`, `scheduler_api`, `single_file_*`) is this room's own.
"""
