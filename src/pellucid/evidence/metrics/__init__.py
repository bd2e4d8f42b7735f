"""How near images are to a reference and to their prompts: FID, KID, precision and recall, image-text cosine."""
