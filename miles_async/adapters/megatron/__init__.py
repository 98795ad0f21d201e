"""Megatron-core, built by mbridge from Hugging Face checkpoints."""

import warnings

# Megatron says at import, once per module, what it falls back from where there is no CUDA.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed")
