"""A Ray cluster of three nodes on one machine, with a network whose links can be unplugged."""
