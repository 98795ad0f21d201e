"""LoRA: the adapters that `actor_train` trains, and that the engines of `actor_infer` load."""

from __future__ import annotations

from collections.abc import Sequence

from miles_async.config.combined_keys import CombinedKeys
from miles_async.errors import UserError
from miles_async.models.lora_layers import ALL_LINEAR, is_name, select_modules

_TRAINED, _LOADED = "actor_train.model_args", "actor_infer.model_args"
_RANK = 8
"""ROLL's default of lora_rank (`roll/configs/model_args.py`). That of lora_alpha is twice the rank."""


def adapters(keys: CombinedKeys) -> None:
    """Rank, factor and layers of the adapters, which both sections have. `lora_target` turns them on."""
    target = f"{_TRAINED}.lora_target"
    keys.note("has no effect: the engines load the adapter of actor_train", *_of(_LOADED))
    for section in (_TRAINED, _LOADED):
        own = f"{section}.lora_target"
        if keys.values.get(own) is None:
            keys.note("has no effect without lora_target", *_of(section))
        elif keys.values.get(target) is None:
            keys.refuse(f"{own} needs {target}: set both to the same value, or remove it")
        else:
            _adapter(keys, section)


def _of(section: str) -> Sequence[str]:
    return [f"{section}.{name}" for name in ("lora_target", "lora_rank", "lora_alpha", "lora_dropout")]


def _adapter(keys: CombinedKeys, section: str) -> None:
    target_key, rank_key, alpha_key, dropout_key = _of(section)
    rank, alpha = keys.whole_number(rank_key) or _RANK, keys.number(alpha_key)
    keys.set("learner.lora_rank", rank, rank_key if rank_key in keys.values else target_key)
    if alpha or section == _TRAINED:
        keys.set("learner.lora_alpha", alpha or 2 * rank, alpha_key if alpha else target_key)
    modules, trained = _modules(keys, target_key), keys.values[f"{_TRAINED}.lora_target"]
    # What the trained all-linear chooses depends on the model, so it cannot be compared with names.
    if modules is not None and (section == _TRAINED or trained != ALL_LINEAR):
        keys.set("learner.lora_target_modules", [*modules], target_key)
    if section == _TRAINED and (dropout := keys.number(dropout_key)) is not None:
        keys.set("learner.lora_dropout", dropout, dropout_key)


def _modules(keys: CombinedKeys, key: str) -> Sequence[str] | None:
    """The layers of `lora_target`, which may have Megatron's names or be patterns; None after a problem."""
    target = keys.values[key]
    names = target.split(",") if isinstance(target, str) else target
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        keys.refuse(f"{key} {target!r:.80} is not a list of layers: write it as all-linear or q_proj,v_proj")
        return None
    stripped = [name.strip() for name in names]
    try:
        modules = select_modules(stripped)
    except UserError as error:
        keys.refuse(f"{key}: {error}")
        return None
    return modules if ALL_LINEAR not in stripped and all(map(is_name, stripped)) else stripped
