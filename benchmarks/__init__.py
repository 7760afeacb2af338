"""The ops measured against XLA's own collectives: `python -m jax_ep bench <what>`."""
