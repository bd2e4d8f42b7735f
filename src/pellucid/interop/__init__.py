"""Other people's formats: diffusers' scheduler configs and three-call API, and k-diffusion's model convention."""
