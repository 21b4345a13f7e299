"""Installing versions beside an inference engine. Only `inference.vllm` imports vLLM."""
