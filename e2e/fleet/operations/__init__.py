"""What is done to a running fleet: pause, release of memory, checks, restarts, profiles, and a trainer that does it all
by itself. All on one fleet of two engines."""
