"""Training: supervised fine-tuning and DPO on the feed, with torch, transformers and accelerate."""
