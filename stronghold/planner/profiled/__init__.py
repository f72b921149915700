"""Plans from a profile that somebody else has measured: operators' times and bytes by tensor-parallel degree."""
