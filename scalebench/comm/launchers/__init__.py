"""Launchers: the programs that start real ranks, one file each."""
