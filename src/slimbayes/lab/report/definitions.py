"""What each number of the report means, in a sentence each."""

from __future__ import annotations

GENERAL = {
    "Standard error (±)": "The standard deviation over seeds (with n − 1) divided by √n: how far the mean over other "
    "seeds is likely to lie. With one seed there is none.",
    "Shifted": "The mean over all shifts and severities of the test data: the same examples, disturbed.",
    "Δ NLL to det.": "Shifted NLL minus that of the deterministic network with the same seed, then mean and standard "
    "error over seeds; negative is better. Pairing removes what the two have in common.",
    "NLL": "Negative log-likelihood: minus the mean logarithm of the probability that the prediction, averaged over "
    "draws, gave to the truth. It rewards being right and being honest about doubt. Lower is better.",
    "Parameters, overhead": "Numbers that are stored, and how many more than the plain network has, in percent.",
    "Train s": "Wall-clock seconds of one training run.",
    "Predict ms": "Milliseconds per test example, with all draws of the model.",
    "KL": "Kullback–Leibler divergence of the learned distribution over weights from the prior, summed over "
    "layers: what the training loss charges for moving away from the prior.",
}
CLASSIFICATION = {
    "Accuracy": "The share of examples whose most probable class is the true one. Higher is better.",
    "ECE": "Expected calibration error: predictions are sorted into 15 bins by confidence, and the gap between mean "
    "confidence and accuracy is averaged over examples. Lower is better.",
    "Confidence": "The probability of the predicted class.",
    "Entropy": "How spread out the predicted probabilities are, in nats: 0 for a sure prediction, the logarithm of "
    "the number of classes for a uniform one.",
    "Mutual information (MI)": "The part of the entropy that comes from draws that disagree: doubt about the model "
    "and not about the data.",
    "AUROC out of distribution": "The probability that a random example from elsewhere gets a higher score (entropy or "
    "mutual information) than a random test example: 0.5 is chance, 1 is perfect.",
    "Disagreement": "The share of examples on which two members predict different classes, averaged over pairs of "
    "members and divided by one minus the accuracy.",
}
REGRESSION = {
    "RMSE": "The square root of the mean squared error of the mean prediction, in the target's units. Lower is better.",
    "Coverage": "The share of test targets inside the central predictive interval of a level; 90 % intervals should "
    "hold 90 %.",
    "Width": "The mean width of the 90 % interval, in the target's units. Narrow is good only while coverage holds.",
    "Epistemic band": "The spread of the mean predictions over draws: doubt about the function, which more data would "
    "reduce. The total band adds the noise of the data.",
}


def definitions(task: str) -> dict[str, str]:
    """Every term of a report on this task, with its meaning.

    >>> "RMSE" in definitions("regression"), "ECE" in definitions("regression")
    (True, False)
    """
    return GENERAL | (CLASSIFICATION if task == "classification" else REGRESSION)
