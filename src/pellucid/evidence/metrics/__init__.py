"""How near images are to a reference and to their prompts.

`fid`, `kid`, `precision_recall`, `image_text`, from features of `inception` or CLIP; `images` reads what is measured,
`score` puts the figures into one record.
"""
