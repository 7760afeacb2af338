"""moe_mlp beside other libraries' layers, on one GPU: `python -m jax_ep bench peers`.

torch must be installed. SonicMoE goes into a folder of its own, beside a torch newer than it asks for: 0.1.2.post1 runs
with torch 2.11 on Python 3.12.

    bash benchmarks/peers/fetch.sh                  # where there is a network: writes peers.tar.xz
    mkdir /tmp/peers && tar xf peers.tar.xz -C /tmp/peers
    python -m jax_ep bench peers --site /tmp/peers --peers sonic --tune    # once, about a minute a shape
    python -m jax_ep bench peers --site /tmp/peers

All hold their operands at once: where the memory does not suffice, name fewer --peers. A peer is a module of this
folder with a `Layer` (child.py), which runs in a process of its own.
"""
