"""Models of Megatron-Bridge against transformers: `make test-bridge`."""
