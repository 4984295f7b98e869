"""What an owner and a source say to each other: frames, shared memory, layout. Needs the standard library only."""
