"""Profiles of a few operators, as files that a test writes."""

import random

HEAD = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved"
SAMPLES, DEGREES = (1, 2), (1, 2)


def write_profile(folder, model, names, *, seed=0, samples=SAMPLES, degrees=DEGREES, algorithms=(0,)):
    """Writes random costs of operators that larger degrees share, not quite evenly."""
    rng = random.Random(seed)
    base = {
        name: [rng.uniform(*of) for of in ((500, 2000), (500, 2000), (2, 40), (2, 40), (0.1, 4), (2, 40))]
        for name in names
    }
    for each in samples:
        for degree in degrees:
            for algorithm in algorithms:
                lines = [HEAD]
                for name in names:
                    forward, backward, enters, leaves, weights, held = base[name]
                    slower = (1 + 0.15 * (degree - 1)) * (1.0 + 0.2 / each) * rng.uniform(0.95, 1.05)
                    times = [time * each / degree * slower for time in (forward, backward)]
                    sizes = [enters * each, leaves * each, weights / degree, held * each / degree]
                    numbers = [*times, *sizes, rng.uniform(0, 3), rng.uniform(0, 6)]
                    lines.append(",".join([name, *(f"{number:.3f}" for number in numbers)]))
                path = folder / f"{model}_mbs{each}_tp{degree}_algo{algorithm}.csv"
                path.write_text("\n".join(lines) + "\n")
    sizes = ",".join(str(2**n) for n in range(8))
    (folder / "p2p_intra_node.csv").write_text(f"{sizes}\n{','.join(str(20 + n) for n in range(8))}\n")
    (folder / "p2p_inter_node.csv").write_text(f"{sizes}\n{','.join(str(4 + n / 4) for n in range(8))}\n")
    for kind in ("all_gather", "all_to_all"):
        rows = "\n".join(f"{size},{0.1 + 0.02 * size:.3f}" for size in range(200))
        (folder / f"prim_{model}_{kind}_2gpus.csv").write_text(f"data_size(MB),time(ms)\n{rows}\n")
    return folder
