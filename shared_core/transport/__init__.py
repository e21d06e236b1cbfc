"""How the processes of a job reach each other: one authenticated channel, and the job's store behind it."""
