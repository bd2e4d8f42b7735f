"""From a bundle on disk to images: load, prepare, denoise, decode; memory policy, recipes and sheets.

Loading: `load`, `model` (a model and what its weights decide), `shelf` (which files a name means), `policy`. `stages`
measures and bounds each part of a run. A run:
`request`, `prepare`, `decode`, `pipeline`, `result`, `encoders` with `text`, `conditions` and `image_inputs`, `images`.
Repeating one: `recipe`, `repeat`, `fingerprint`, `compare`. Several at once: `sheet`. Memory: `memory`, `tracker`.
What a model is made of: `inspection`, `inspection_graph`. Live diffusers pipelines: `wrapped`. `parameters` reads the
texts of other programs' images, `peer_words` answers to other libraries' names. The rest is this room's own.
"""
