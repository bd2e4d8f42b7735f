"""The networks and what wraps them. Names of weights and configs are diffusers', so that its files load as they are.

Networks: `unet`, `dit`, `vae`, `tiny_vae`, `clip`, `controlnet`, `ip_adapter`. Their configs are in the same files,
or in `unet_config` and `clip_config`. Guidance: `guidance` (what is asked for), `rules` (its parts), `guided` (the
denoiser). Adapters: `lora`, `lora_delta`. Large images: `tiles`. How it computes: `attention` (backends), `inputs`
(batches of conditions), `ops` (the operations that networks are written in) with `kernels` and `triton_kernels` for
CUDA, `hoist` (what is computed once for a run), `captured` (a step as one CUDA graph), `graph_memory`, `quantize`.
Training and memory measurement also name the layers: `blocks`, `dit_blocks`, `embeddings`. `config`, the reader of
configs, is for this room and `interop`.
"""
