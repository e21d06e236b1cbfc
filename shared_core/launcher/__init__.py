"""The agent of one machine, the launcher's process: rendezvous, workers, standbys, leases, detection of failures."""
