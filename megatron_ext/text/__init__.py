"""Language models: GPT pretraining, and fine-tuning on conversations."""
