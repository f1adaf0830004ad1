"""Models as Hugging Face lays them out: what transformers and vLLM load."""
