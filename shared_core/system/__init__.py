"""What the operating system gives: processes, private folders, sockets between machines."""
