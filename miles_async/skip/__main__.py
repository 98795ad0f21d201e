"""`python -m miles_async.skip ls|rm`: the command of `adapters/storage/recordings_command.py`."""

import sys

from miles_async.adapters.storage.recordings_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
