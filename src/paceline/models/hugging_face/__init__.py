"""Models in the Hugging Face format, which transformers and vLLM load."""
