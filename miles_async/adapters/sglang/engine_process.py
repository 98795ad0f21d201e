"""The SGLang server process: `python -m miles_async.adapters.sglang.engine_process --model-path …`.

Does the same as `sglang.launch_server`, and sets the API key. A key in the arguments would be visible to every user of
the machine.
"""

from __future__ import annotations

import gc
import os
import sys

from miles_async import cpu_compat
from miles_async.adapters.sglang.server_key import receive_key
from miles_async.adapters.system.memory import THRESHOLDS, uncollected_imports

# Here, and not in `main`, because SGLang's spawned processes import this module but do not call `main`.
cpu_compat.install()
if __name__ in ("__main__", "__mp_main__"):
    # Where Megatron is installed, a debugging tool of SGLang imports it, which takes a second.
    sys.modules["megatron"] = None  # type: ignore[assignment]


def main() -> None:
    key = receive_key()

    with uncollected_imports():
        from sglang.srt.utils import common

        # SGLang 0.5.20 computes adapters of linear attention, and its arguments do not name these layers.
        common.SUPPORTED_LORA_TARGET_MODULES += ["in_proj_qkvz", "out_proj"]
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        # The hooks of `plugin.py` are set here. SGLang imports the modules that they belong to: almost all of SGLang.
        load_plugins()
    # Requests and answers are freed by reference counting; the collector would take an eighth of the server's CPU time.
    gc.set_threshold(*THRESHOLDS)
    arguments = prepare_server_args(sys.argv[1:])
    arguments.api_key = key
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
