"""Finds the plug-in for a model type among the entry points of all installed packages."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from miles_async.errors import UserError
from miles_async.json_values import shown_error
from miles_async.models.plugin import ModelPlugin
from miles_async.user_code import USER_CODE_ERRORS

GROUP = "miles_async.models"
"""Group of the entry points. The name of an entry point is the `model_type` that its plug-in supports."""


@cache
def has_plugin(model_type: str) -> bool:
    """Whether a package registers a plug-in for the model type. Does not import the plug-in."""
    return bool(entry_points(group=GROUP, name=model_type))


def missing_plugin(model_type: str) -> str:
    """The reason why models of a type without a plug-in cannot be trained, as one sentence."""
    supported = ", ".join(sorted(entry_points(group=GROUP).names)) or "none: this installation lacks the entry points"
    return (
        f"no model plug-in supports the model type {model_type!r}; install a package with the entry point "
        f"{model_type!r} in the group {GROUP!r}, or use a model of a supported type ({supported})"
    )


@cache
def find_plugin(model_type: str) -> ModelPlugin:
    """Import and create the plug-in for a model type.

    Raises UserError if there is none or more than one, or if the plug-in cannot be imported or created.
    """
    found = entry_points(group=GROUP, name=model_type)
    if not found:
        raise UserError(missing_plugin(model_type))
    if len(found) > 1:
        plugins = " and ".join(sorted(map(_origin, found)))
        raise UserError(
            f"the model type {model_type!r} has {len(found)} plug-ins, {plugins}: uninstall all but one of the packages"
        )
    [entry] = found
    try:
        plugin = entry.load()()
    except USER_CODE_ERRORS as error:
        # Importing a plug-in runs user code, which can raise any exception.
        raise UserError(f"the model plug-in {entry.value} cannot be imported: {shown_error(error)}") from error
    if not isinstance(plugin, ModelPlugin):
        raise UserError(
            f"the entry point {entry.value} for the model type {model_type!r} is not a model plug-in: derive its class "
            "from miles_async.models.plugin.ModelPlugin"
        )
    return plugin


def _origin(entry: EntryPoint) -> str:
    return f"{entry.value} of {entry.dist.name}" if entry.dist is not None else entry.value
