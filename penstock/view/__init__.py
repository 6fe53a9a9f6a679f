"""Applies loss policies, length limits, hold-outs and mixtures to a prepared dataset at load time, without re-encoding.

`BaseView` is a sequence of training examples, `BaseMixture` combines several views, `index` decides which window of
which row a view serves, and `gather` reads many items at once for collating.
"""
