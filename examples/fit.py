"""Train with sb.fit on digits by name, then measure clean and shifted test data."""

import slimbayes as sb


def main(epochs: int = 15) -> dict[str, float]:
    digits = sb.data.load("digits")
    network = sb.models.build("dense", digits.shape, digits.num_outputs)
    model = sb.bayesianize(network, sb.BatchEnsemble(components=4, random_sign_init=0.5))
    result = sb.fit(model, digits, epochs=epochs, batch_size=64, lr=3e-3, weight_decay=1e-2, progress=False)
    print(f"{result.step} steps, training NLL {result.history[-1]['nll']:.3f}")

    found = {}
    for name, split in {
        "clean": digits.test,
        **{f"{s.name} 3": s.apply(digits.test, severity=3) for s in sb.data.shifts_for(digits)},
    }.items():
        batches = sb.data.Batches(split, 256, scaling=digits.scaling, shuffle=False)
        metrics = sb.evaluate(model, batches, seed=0)
        found[name] = metrics["nll"]
        shown = {key: round(metrics[key], 3) for key in ("nll", "accuracy", "ece", "disagreement")}
        print(f"{name:12} {shown}")
    return found


if __name__ == "__main__":
    main()
