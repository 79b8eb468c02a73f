"""Video runs: flow matching on latent clips."""
