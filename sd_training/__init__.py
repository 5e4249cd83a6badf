"""Train latent text-to-image diffusion models and save folders that diffusers loads."""

__version__ = "0.1.0"
