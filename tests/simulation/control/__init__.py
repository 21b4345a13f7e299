"""Control sides, engines and the daemon's fleets under simulated time, processes and connections."""
