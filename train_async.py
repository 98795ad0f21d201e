"""Asynchronous training: generation continues while the learner trains and publishes weights.

    python train_async.py --config configs/arithmetic-cpu.yaml \
        --rollout-function-path fully_async_rollout.generate_rollout_fully_async
"""

import signal
import sys

from miles_async.config.cli import parse_or_exit
from workers.check_config import read_files

if __name__ == "__main__":
    config = parse_or_exit(sys.argv[1:], entry="train_async.py", read_files=read_files)
    # Until the driver installs its own handler, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The number of engines cannot change yet, see SIGHUP in docs/how-to/cluster.md.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Import the heavy modules only after the configuration has been checked.
    from workers.driver import drive, leave

    leave(drive(config, sys.argv[1:], entry="train_async.py"))
