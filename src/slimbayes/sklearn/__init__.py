"""scikit-learn estimators whose predictions come with calibrated uncertainty."""

from slimbayes.sklearn.classifier import BayesianMLPClassifier, BayesianNetClassifier
from slimbayes.sklearn.regressor import BayesianMLPRegressor, BayesianNetRegressor

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor", "BayesianNetClassifier", "BayesianNetRegressor"]
