"""Asynchronous training: generation goes on while the learner trains and publishes.

    python train_async.py --config configs/arithmetic-cpu.yaml \
        --rollout-function-path fully_async_rollout.generate_rollout_fully_async
"""

import signal
import sys

from miles_async.config.cli import parse_or_exit

if __name__ == "__main__":
    config = parse_or_exit(sys.argv[1:], entry="train_async.py")
    # Until the driver has something to end, Ctrl-C simply ends this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The heavy imports wait until the configuration is known to be good.
    from workers.driver import drive

    sys.exit(drive(config, sys.argv[1:], entry="train_async.py"))
