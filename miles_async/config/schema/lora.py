"""Low-rank adapters, which are trained in place of the model's weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from miles_async.config.schema.megatron import MegatronSwitches
from miles_async.models.lora import scale_of
from miles_async.models.lora_layers import ALL_LINEAR, Targets


class LoraSettings(MegatronSwitches):
    """Settings of LoRA (arXiv 2106.09685). Names of modules and files are those of the library PEFT."""

    lora_rank: int = Field(0, ge=0)
    """Rank of the low-rank adapters that are trained beside the frozen weights of the model (LoRA). 0 trains all
    weights."""
    lora_alpha: float = Field(16.0, gt=0)
    """The output of an adapter is multiplied by lora_alpha / lora_rank (lora_type)."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of the adapters' inputs that is set to 0 at random while gradients are computed."""
    lora_target_modules: list[str] = [ALL_LINEAR]
    """Linear layers that get an adapter: all-linear, or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj, of in_proj_qkv, in_proj_z and out_proj in linear attention, or of Megatron's linear_qkv, linear_proj,
    in_proj, linear_fc1 and linear_fc2. The feed-forward layers of a model with experts are those of each expert, and
    of the expert that all tokens use. all-linear leaves out the output layer lm_head, which can be listed beside
    it, and the routers of experts. An entry may also be the end of a name, such as layers.3.self_attn.q_proj, or a
    pattern of whole names in the checkpoint or in Megatron, with * for any text or as a regular expression."""
    lora_exclude_modules: list[str] = []
    """Linear layers among lora_target_modules that get no adapter, in the same notation."""
    lora_type: Literal["lora", "rslora"] = "lora"
    """Factor of the adapters' outputs: lora is lora_alpha / lora_rank, and rslora lora_alpha / sqrt(lora_rank) (arXiv
    2312.03732)."""
    lora_load: str | None = None
    """Folder in PEFT's format whose adapter the training starts from. If unset, adapters start as those of PEFT: they
    do not change the model."""
    experts_shared_outer_loras: bool = False
    """Let all experts of a layer share A of their gate and up projections and B of their down projections, as SGLang
    and Miles know it under this name. The other matrices are those of each expert."""
    lora_merge: bool = False
    """Export (save_hf) the whole model with the adapters merged into its weights, in place of a folder in PEFT's
    format."""

    @field_validator("lora_target_modules", "lora_exclude_modules", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        """Miles separates modules by commas."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            return value
        return [part.strip() for text in texts for part in text.split(",") if part.strip()]

    @field_validator("lora_type", mode="before")
    @classmethod
    def _canonical(cls, value: Any) -> Any:
        """canonical_lora of Miles gives each layer of the checkpoint an A and a B, as lora does here."""
        return "lora" if value == "canonical_lora" else value

    @property
    def lora_targets(self) -> Targets:
        """The linear layers that get an adapter."""
        return Targets(tuple(self.lora_target_modules), tuple(self.lora_exclude_modules))

    @property
    def lora_scale(self) -> float:
        """The factor of the adapters' outputs."""
        return scale_of(self.lora_rank, self.lora_alpha, self.lora_type)
