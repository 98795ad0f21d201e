"""Synchronous training: generate, train and publish in turns, with the flags of train_async.py.

python train.py --config configs/arithmetic-cpu.yaml
"""

import signal
import sys

from miles_async.config.cli import parse_or_exit

if __name__ == "__main__":
    config = parse_or_exit(sys.argv[1:], entry="train.py")
    # Until the driver has something to end, Ctrl-C simply ends this process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The heavy imports wait until the configuration is known to be good.
    from workers.driver import drive

    sys.exit(drive(config, sys.argv[1:], entry="train.py"))
