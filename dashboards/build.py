"""Writes the dashboards as JSON files for Grafana.

python -m dashboards.build [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.content import ALL

FOLDER = Path(__file__).parent / "grafana"


def write(folder: Path) -> list[Path]:
    """Write one file per dashboard into `folder`, for import or provisioning in Grafana, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for dashboard in ALL:
        path = folder / f"{dashboard.name}.json"
        path.write_text(JSONEncoder(sort_keys=True, indent=2).encode(dashboard.build().build()) + "\n")
        written.append(path)
    return written


if __name__ == "__main__":
    for path in write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
