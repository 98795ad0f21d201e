"""The learner: Megatron-core models, built from Hugging Face checkpoints as model plug-ins describe them."""

import warnings

# Without CUDA every Megatron module warns at import about the optional kernels that it does without.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed")
