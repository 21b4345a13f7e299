"""The part of Resharder that runs beside an inference engine. Only `inference.vllm` imports vLLM."""
