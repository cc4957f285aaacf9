"""Which labels the result of a PromQL expression has, and whether all that it names is there."""

from __future__ import annotations

from collections.abc import Mapping

import promql_parser as promql

_SETS = {"and", "or", "unless"}
_KEEPING = {"topk", "bottomk"}


class UnknownNameError(Exception):
    """A metric or a label that nothing has."""


def labels_of(expression: str, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Labels of the result. `metrics`: the labels of each series that there is. Raises UnknownNameError, and ValueError
    for what is no PromQL."""
    return _labels(promql.parse(expression), metrics)


def metrics_of(expression: str) -> set[str]:
    """Names of the metrics in an expression."""
    found: set[str] = set()

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            found.add(node.name)
        elif isinstance(node, promql.MatrixSelector):
            found.add(node.vector_selector.name)

    promql.walk(promql.parse(expression), visit)
    return found


def _labels(node: promql.Expr, metrics: Mapping[str, frozenset[str]]) -> frozenset[str]:
    if isinstance(node, promql.VectorSelector):
        if node.name not in metrics:
            raise UnknownNameError(f"no metric {node.name}")
        return _known({matcher.name for matcher in node.matchers.matchers}, metrics[node.name], node)
    if isinstance(node, promql.MatrixSelector):
        return _labels(node.vector_selector, metrics)
    if isinstance(node, promql.Call):
        # A function of a vector keeps its labels; of those used here only histogram_quantile needs one, and takes it.
        found = frozenset().union(*(_labels(argument, metrics) for argument in node.args))
        return _known({"le"}, found, node) - {"le"} if node.func.name == "histogram_quantile" else found
    if isinstance(node, promql.AggregateExpr):
        inner = _labels(node.expr, metrics)
        named = frozenset(node.modifier.labels if node.modifier else ())
        _known(named, inner, node)
        if str(node.op) in _KEEPING:
            return inner
        return inner - named if node.modifier and node.modifier.type == promql.AggModifierType.Without else named
    if isinstance(node, promql.BinaryExpr):
        return _joined(node, _labels(node.lhs, metrics), _labels(node.rhs, metrics))
    if isinstance(node, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr)):
        return _labels(node.expr, metrics)
    return frozenset()


def _joined(node: promql.BinaryExpr, left: frozenset[str], right: frozenset[str]) -> frozenset[str]:
    modifier = node.modifier
    matching = modifier.matching if modifier else None
    named = frozenset(matching.labels if matching else ())
    on = matching is not None and matching.type == promql.LabelModifierType.Include
    if matching is not None:
        _known(named, left, node)
        if on:
            _known(named, right, node)
    if str(node.op) == "or":
        return left & right  # what every series of the result has
    if str(node.op) in _SETS:
        return left
    if isinstance(node.lhs, promql.NumberLiteral):
        return right
    if modifier is not None and modifier.card == promql.VectorMatchCardinality.ManyToOne:
        carried = frozenset(modifier.group_labels or ())
        _known(carried, right, node)
        return left | carried
    return named if on else left


def _known(named: set[str] | frozenset[str], there: frozenset[str], node: promql.Expr) -> frozenset[str]:
    """`there`; UnknownNameError for a name that is not among them."""
    if missing := sorted(named - there):
        raise UnknownNameError(f"no label {', '.join(missing)} in {node.prettify()}")
    return there
