"""The rivals that sample or ask: each formula by hand and against an independent form, then on a real (tiny) model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semgrad_guard import Binding, Calibration, GenerationOptions, Guard, LanguageModel, Message, Policy, calibrate
from semgrad_guard.engine.sampling import DiverseBeams, Sampling
from semgrad_guard.engine.text_pairs import CrossEncoder, Entailment
from semgrad_guard.engine.words import token_f1
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.estimators import (
    ESTIMATORS,
    SAR,
    Degree,
    Inside,
    LengthNormalisedEntropy,
    MutualInformation,
    PTrue,
    SelfConsistency,
    SemanticDensity,
    SemanticEntropy,
)
from semgrad_guard.estimators.degree import degree_uncertainty
from semgrad_guard.estimators.equivalence import ExactMatchEquivalence, NLIEquivalence
from semgrad_guard.estimators.inside import eigen_score
from semgrad_guard.estimators.ln_pe import predictive_entropy
from semgrad_guard.estimators.mutual_information import mutual_information
from semgrad_guard.estimators.p_true import p_false
from semgrad_guard.estimators.sar import relevant_energy, sentence_sar
from semgrad_guard.estimators.self_consistency import disagreement
from semgrad_guard.estimators.semantic_density import density
from semgrad_guard.estimators.semantic_entropy import cluster_entropy
from semgrad_guard.estimators.suite import paper_suite
from semgrad_guard.evaluation.questions.prompts import Wording, conversation

LOG_PROBS = st.floats(-30, 0)
ASKING = (
    LengthNormalisedEntropy,
    PTrue,
    SelfConsistency,
    Degree,
    Inside,
    SemanticEntropy,
    SemanticDensity,
    MutualInformation,
    SAR,
)
QUESTIONS = ["q", "What is it?"]


# --- the formulas


def test_predictive_entropy_by_hand() -> None:
    assert predictive_entropy([-0.5, -1.5, -4.0]) == pytest.approx(2.0)


def test_disagreement_by_hand() -> None:
    assert disagreement([True, True, False, True]) == 0.25
    assert (disagreement([True] * 3), disagreement([False] * 3)) == (0.0, 1.0)


def similarities(size: int) -> st.SearchStrategy[np.ndarray]:
    def symmetric(values: list[float]) -> np.ndarray:
        matrix = np.eye(size)
        matrix[np.tril_indices(size, -1)] = values
        return np.maximum(matrix, matrix.T)

    count = size * (size - 1) // 2
    return st.lists(st.floats(0, 1), min_size=count, max_size=count).map(symmetric)


@given(similarities(4), st.permutations(range(4)))
def test_degree_uncertainty(similarity: np.ndarray, order: list[int]) -> None:
    found = degree_uncertainty(similarity)
    assert found == pytest.approx(1 - similarity.mean())  # the mean dissimilarity, written another way
    assert degree_uncertainty(similarity[np.ix_(order, order)]) == pytest.approx(found)
    assert found + 1e-12 >= 0
    assert found <= 1 - 1 / 4 + 1e-12


def test_degree_uncertainty_at_its_ends() -> None:
    assert degree_uncertainty(np.ones((5, 5))) == 0.0
    assert degree_uncertainty(np.eye(5)) == pytest.approx(0.8)
    assert degree_uncertainty(np.array([[1, 0.5], [0.5, 1]])) == pytest.approx(0.25)


def test_eigen_score_by_hand() -> None:
    # Rows with variances 2 and 8 and covariance 0: the matrix is diagonal.
    embeddings = np.array([[1.0, -1, 1, -1], [2.0, 2, -2, -2]])
    expected = (math.log(4 / 3 + 0.1) + math.log(16 / 3 + 0.1)) / 2
    assert eigen_score(embeddings, alpha=0.1) == pytest.approx(expected)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4))
def test_eigen_score_is_the_log_determinant(rows: list[list[float]]) -> None:
    embeddings = np.array(rows)
    centred = np.eye(6) - np.ones((6, 6)) / 6  # J_d of the paper's appendix
    covariance = embeddings @ centred @ embeddings.T / 5 + 1e-3 * np.eye(len(rows))
    found = eigen_score(embeddings, alpha=1e-3)
    assert found == pytest.approx(np.linalg.slogdet(covariance)[1] / len(rows), abs=1e-6)
    assert eigen_score(embeddings[::-1], alpha=1e-3) == pytest.approx(found)
    assert found >= math.log(1e-3) - 1e-9
    # Samples that are all the same span one direction only.
    same = eigen_score(np.array([rows[0]] * 3), alpha=1e-3)
    assert same == pytest.approx((math.log(3 * np.var(rows[0], ddof=1) + 1e-3) + 2 * math.log(1e-3)) / 3, abs=1e-6)


def test_cluster_entropy_by_hand() -> None:
    # p = (.2 + .4) / .8 and .2 / .8
    found = cluster_entropy([0, 1, 0], [math.log(0.2), math.log(0.2), math.log(0.4)])
    assert found == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


@given(st.lists(st.tuples(st.integers(0, 3), LOG_PROBS), min_size=1, max_size=10), st.randoms())
def test_cluster_entropy(members: list[tuple[int, float]], random) -> None:
    numbers, weights = [n for n, _ in members], [w for _, w in members]
    found = cluster_entropy(numbers, weights)
    mass = {n: math.fsum(math.exp(w) for m, w in members if m == n) for n in numbers}
    shares = [value / math.fsum(mass.values()) for value in mass.values()]
    assert found == pytest.approx(sum(-p * math.log(p) for p in shares if p > 0), abs=1e-9)
    assert -1e-12 <= found <= math.log(len(mass)) + 1e-9
    random.shuffle(members)
    assert cluster_entropy([n for n, _ in members], [w for _, w in members]) == pytest.approx(found, abs=1e-9)


def test_cluster_entropy_at_its_ends() -> None:
    assert cluster_entropy([0, 0, 0], [-700.0, -900.0, -1000.0]) == 0.0
    assert cluster_entropy([0, 1, 2], [-800.0] * 3) == pytest.approx(math.log(3))


def test_density_by_hand() -> None:
    # (.5 x 1 + .25 x .4 + .25 x 0) / 1
    assert density([0.0, 0.6, 1.0], [math.log(0.5), math.log(0.25), math.log(0.25)]) == pytest.approx(0.6)


@given(st.lists(st.tuples(st.floats(0, 1.5), LOG_PROBS), min_size=1, max_size=8))
def test_density(references: list[tuple[float, float]]) -> None:
    found = density([d for d, _ in references], [w for _, w in references])
    inside = sum(math.exp(w) * (1 - d if d <= 1 else 0) for d, w in references)
    assert found == pytest.approx(inside / sum(math.exp(w) for _, w in references))
    assert 0 <= found <= 1 + 1e-12
    assert density([0.0 for _ in references], [w for _, w in references]) == pytest.approx(1.0)


def information(cluster_of: Sequence[int], first: Sequence[float], second: Sequence[Sequence[float]]) -> float:
    """Algorithm 3, line by line, over dictionaries."""
    S = sorted(set(cluster_of))
    D = {i: [j for j, number in enumerate(cluster_of) if number == i] for i in S}
    mu1 = {i: sum(math.exp(first[j]) for j in D[i]) for i in S}
    mu2 = {(t, i): sum(math.exp(second[i][j]) for j in D[t]) for t in S for i in S}
    Z = sum(mu1.values())
    Zi = {i: sum(mu2[j, i] for j in S) for i in S}
    p1 = {i: mu1[i] / Z for i in S}
    p2 = {(t, i): mu2[t, i] / Zi[i] for t in S for i in S}
    total = 0.0
    for i in S:
        for t in S:
            joint = p1[i] * p2[t, i]
            product = p1[i] * sum(p1[j] * p2[t, j] for j in S)
            total += joint * math.log(joint / product) if joint else 0.0
    return total


@given(st.data())
def test_mutual_information(data: st.DataObject) -> None:
    clusters = [0, 1, *data.draw(st.lists(st.integers(0, 2).map(lambda n: min(n, 1)), max_size=3)), 2]
    row = st.lists(LOG_PROBS, min_size=len(clusters), max_size=len(clusters))
    first, second = data.draw(row), data.draw(st.lists(row, min_size=3, max_size=3))
    found = mutual_information(clusters, np.array(first), np.array(second))
    assert found == pytest.approx(information(clusters, first, second), abs=1e-9)
    assert -1e-9 <= found <= math.log(3) + 1e-9


def test_mutual_information_at_its_ends() -> None:
    even = np.log([0.5, 0.5])
    # The second answer is the same whatever the first: nothing is learnt.
    assert mutual_information([0, 1], even, np.log([[0.3, 0.7], [0.3, 0.7]])) == pytest.approx(0.0, abs=1e-12)
    # The second answer repeats the first: all of its entropy.
    repeats = np.array([[0.0, -800.0], [-800.0, 0.0]])
    assert mutual_information([0, 1], even, repeats) == pytest.approx(math.log(2))
    # By hand: joint (.45, .05; .25, .25), second marginal (.7, .3)
    expected = 0.45 * math.log(0.45 / 0.35) + 0.05 * math.log(0.05 / 0.15) + 0.25 * math.log(0.25 / 0.35)
    expected += 0.25 * math.log(0.25 / 0.15)
    found = mutual_information([0, 1], even, np.log([[0.9, 0.1], [0.5, 0.5]]))
    assert found == pytest.approx(expected)
    damped = mutual_information([0, 1], even, np.log([[0.9, 0.1], [0.5, 0.5]]), gamma1=0.1, gamma2=0.1)
    assert damped < found


def test_sar_by_hand() -> None:
    assert relevant_energy([-1.0, -2.0, -4.0], [0.1, 0.0, 0.3]) == pytest.approx(0.25 * 1 + 0.75 * 4)
    assert relevant_energy([-1.0, -3.0], [0.0, 0.0]) == pytest.approx(2.0)
    # p' = .5 and .25; -log(.5 + .8 x .25 / .1) and -log(.25 + .8 x .5 / .1)
    found = sentence_sar([-math.log(0.5), -math.log(0.25)], [[1, 0.8], [0.8, 1]], t=0.1)
    assert found == pytest.approx((-math.log(0.5 + 2.0) - math.log(0.25 + 4.0)) / 2)
    assert sentence_sar([3.0, 5.0], np.eye(2), t=0.1) == pytest.approx(4.0)  # nothing shared: the mean energy
    assert math.isfinite(sentence_sar([900.0, 1500.0], np.ones((2, 2)), t=0.001))


@given(st.lists(st.floats(0, 20), min_size=3, max_size=3), similarities(3), st.permutations(range(3)))
def test_sar(energies: list[float], similarity: np.ndarray, order: list[int]) -> None:
    found = sentence_sar(energies, similarity, t=0.01)
    p = [math.exp(-energy) for energy in energies]
    naive = [p[j] + sum(similarity[j, k] * p[k] for k in range(3) if k != j) / 0.01 for j in range(3)]
    assert found == pytest.approx(-sum(map(math.log, naive)) / 3, abs=1e-9)
    shuffled = sentence_sar([energies[i] for i in order], similarity[np.ix_(order, order)], t=0.01)
    assert shuffled == pytest.approx(found, abs=1e-9)


def test_p_false_by_hand() -> None:
    true, false = [math.log(0.3), math.log(0.1)], [math.log(0.05), math.log(0.05)]
    assert p_false(true, false, normalised=True) == pytest.approx(0.2)
    assert p_false(true, false, normalised=False) == pytest.approx(0.6)
    assert p_false([-2000.0], [-2001.0], normalised=True) == pytest.approx(1 / (1 + math.e))


# --- on a model


@pytest.fixture(scope="module")
def evidence(language_model: LanguageModel):
    generations = language_model.generate_batch(QUESTIONS, GenerationOptions(max_new_tokens=5))
    return [generation.evidence for generation in generations]


@pytest.fixture(scope="module")
def nli(make_pair_model) -> Entailment:
    labels = ("contradiction", "neutral", "entailment")
    return Entailment.from_pretrained(str(make_pair_model(labels=labels)))


@pytest.fixture(scope="module")
def cross_encoder(make_pair_model) -> CrossEncoder:
    return CrossEncoder.from_pretrained(str(make_pair_model(labels=("LABEL_0",))))


SHORT = Sampling(count=5, temperature=0.8, max_new_tokens=4)


def test_likelihood_methods_read_their_samples(evidence) -> None:
    for row in evidence:
        samples = [sample for sample in row.samples(SHORT) if sample.ids]
        means = [np.mean(sample.log_probs) for sample in samples]
        assert LengthNormalisedEntropy(SHORT)(row).uncertainty == pytest.approx(-np.mean(means))
        embeddings = np.array([sample.embedding for sample in samples])
        eigenvalues = np.linalg.eigvalsh(np.cov(embeddings) + 1e-3 * np.eye(len(samples)))
        assert Inside(SHORT)(row).uncertainty == pytest.approx(np.log(eigenvalues).mean(), rel=1e-6)
        texts = [sample.text.strip().lower() for sample in samples]
        numbers = [texts.index(text) for text in texts]
        by_words = SemanticEntropy(SHORT, ExactMatchEquivalence())(row).uncertainty
        assert by_words == pytest.approx(cluster_entropy(numbers, means), abs=1e-9)
        discrete = SemanticEntropy(SHORT, ExactMatchEquivalence(), discrete=True)(row).uncertainty
        assert discrete == pytest.approx(cluster_entropy(numbers, [0.0] * len(samples)), abs=1e-9)


def test_meaning_methods_ask_the_nli_model(evidence, nli: Entailment) -> None:
    same = NLIEquivalence(nli)
    for row in evidence:
        texts = [sample.text.strip() for sample in row.samples(SHORT)]

        def both_ways(first: str, second: str, question: str = row.question):
            asked = f"{question} {first}", f"{question} {second}"
            return nli.probabilities([asked, asked[::-1]])

        def agrees(first: str, second: str, ask=both_ways) -> bool:
            return first == second or all(scores.entails for scores in ask(first, second))

        def entailment(first: str, second: str, ask=both_ways) -> float:
            return 1.0 if first == second else sum(scores.entailment for scores in ask(first, second)) / 2

        expected = np.mean([not agrees(row.text.strip(), text) for text in texts])
        assert SelfConsistency(SHORT, same)(row).uncertainty == pytest.approx(expected)
        matrix = [[entailment(first, second) for second in texts] for first in texts]
        assert Degree(SHORT, same)(row).uncertainty == pytest.approx(1 - np.mean(matrix))


def test_semantic_density_weighs_its_references(evidence, nli: Entailment) -> None:
    plan = DiverseBeams(count=4, penalty=1.0, max_new_tokens=5)
    for row in evidence:
        above = below = 0.0
        for text, sample in {s.text.strip(): s for s in row.samples(plan, temperature=0.1) if s.ids}.items():
            asked = f"{row.question} {row.text.strip()}", f"{row.question} {text}"
            there, back = nli.probabilities([asked, asked[::-1]])
            distance = sum(0.5 * (scores.contradiction + scores.neutral / 2) for scores in (there, back))
            weight = math.exp(np.mean(sample.log_probs))
            above += weight * (1.0 if text == row.text.strip() else max(0.0, 1 - distance))
            below += weight
        found = SemanticDensity(plan, NLIEquivalence(nli))(row).uncertainty
        assert found == pytest.approx(1 - above / below, abs=1e-9)


def test_sar_leaves_each_token_out(evidence, cross_encoder: CrossEncoder, language_model: LanguageModel) -> None:
    row, g = evidence[0], cross_encoder.similarities
    samples = [sample for sample in row.samples(SHORT) if sample.ids]
    asked = [f"{row.question} {sample.text.strip()}" for sample in samples]
    p = []
    for sample, whole in zip(samples, asked, strict=True):
        cropped = [sample.ids[:i] + sample.ids[i + 1 :] for i in range(len(sample.ids))]
        rest = [f"{row.question} {language_model._decoder.decode(ids).strip()}" for ids in cropped]
        relevance = 1 - np.array(g([(whole, text) for text in rest]))
        p.append(math.exp((relevance / relevance.sum() * np.array(sample.log_probs)).sum()))
    energies = []
    for j, one in enumerate(asked):
        # Asked for in one direction only: a cross-encoder is nearly symmetric.
        alike = [1.0 if asked[k] == one else g([(asked[max(j, k)], asked[min(j, k)])])[0] for k in range(len(asked))]
        energies.append(-math.log(p[j] + sum(alike[k] * p[k] for k in range(len(p)) if k != j) / 1e-3))
    assert SAR(SHORT, cross_encoder)(row).uncertainty == pytest.approx(np.mean(energies), rel=1e-5)


def likelihood(model: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    with torch.no_grad():
        log_p = model._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return sum(float(log_p[i, token]) for i, token in enumerate(answer))


def test_mutual_information_puts_the_first_answer_into_the_prompt(evidence, language_model: LanguageModel) -> None:
    plan = Sampling(count=6, temperature=0.3, max_new_tokens=4)
    row = evidence[1]
    samples = {s.text.strip(): s for s in reversed([s for s in row.samples(plan) if s.ids])}
    order = list(dict.fromkeys(s.text.strip() for s in row.samples(plan) if s.ids))
    heads: list[str] = []
    cluster_of = []
    for text in order:
        home = next((i for i, head in enumerate(heads) if token_f1(head, text) > 0.25), len(heads))
        heads += [text] if home == len(heads) else []
        cluster_of.append(home)
    assert len(heads) > 1
    second = []
    for head in heads:
        prompt = (
            f"Consider the following question:\nQ: {row.question}\nOne answer to question Q is {head}.\n"
            f"Provide an answer to the following question:\nQ: {row.question}\nA:"
        )
        ids = language_model.render(prompt).ids
        second.append([likelihood(language_model, ids, samples[text].ids) for text in order])
    first = [likelihood(language_model, row.prompt.ids, samples[text].ids) for text in order]
    found = MutualInformation(plan)(row).uncertainty
    assert found == pytest.approx(information(cluster_of, first, second), rel=1e-6)


def test_p_true_asks_through_the_chat_template(evidence, language_model: LanguageModel) -> None:
    for row in evidence:
        prompt = language_model.render(
            f"Question: {row.question}\nProposed Answer: {row.text.strip()}\nIs the proposed answer:\n (A) True\n"
            " (B) False\nThe proposed answer is:"
        )
        tokens = {form: language_model.tokenizer(form)["input_ids"] for form in ("True", "(A)", "False", "(B)")}
        p = {form: math.exp(likelihood(language_model, prompt.ids, ids)) for form, ids in tokens.items()}
        true, false = p["True"] + p["(A)"], p["False"] + p["(B)"]
        assert PTrue()(row).uncertainty == pytest.approx(false / (true + false))
        assert PTrue(normalised=False)(row).uncertainty == pytest.approx(1 - true)


def test_p_true_shows_examples_as_turns(make_language_model) -> None:
    model = make_language_model(max_position_embeddings=512)
    row = model.generate("q", GenerationOptions(max_new_tokens=3)).evidence
    asked = "Question: {}\nProposed Answer: {}\nIs the proposed answer:\n (A) True\n (B) False\nThe proposed answer is:"
    turns = [
        Message("user", asked.format("1 + 1?", "3")),
        Message("assistant", "False"),
        Message("user", asked.format("q", row.text.strip())),
    ]
    ids = model.render(turns).ids
    true, false = (
        sum(math.exp(likelihood(model, ids, model.tokenizer(form)["input_ids"])) for form in forms)
        for forms in (("True", "(A)"), ("False", "(B)"))
    )
    shown = PTrue(examples=(("1 + 1?", "3", False),))
    assert shown(row).uncertainty == pytest.approx(false / (true + false))
    assert Binding(model="m", estimator="p_true", settings=shown.settings()).settings == {
        "normalised": True,
        "examples": ["1 + 1?", "3", False],
    }


def test_p_true_writes_a_blank_before_the_word_where_the_prompt_ends_in_none(make_language_model) -> None:
    model = make_language_model(chat_template=None)
    row = model.generate("q", GenerationOptions(max_new_tokens=3)).evidence
    text = (
        f"Question: q\nProposed Answer: {row.text.strip()}\nIs the proposed answer:\n (A) True\n (B) False\n"
        "The proposed answer is:"
    )
    prompt = model.tokenizer(text)["input_ids"]
    p = {
        form: math.exp(likelihood(model, prompt, model.tokenizer(form)["input_ids"]))
        for form in (" True", " (A)", " False", " (B)")
    }
    true, false = p[" True"] + p[" (A)"], p[" False"] + p[" (B)"]
    assert PTrue()(row).uncertainty == pytest.approx(false / (true + false))


# --- all of them


def brief(estimator):
    """With few and short samples."""
    if estimator is PTrue:
        return PTrue()
    return estimator(
        DiverseBeams(3, max_new_tokens=3) if estimator is SemanticDensity else Sampling(3, max_new_tokens=3)
    )


@pytest.mark.parametrize("estimator", ASKING)
def test_a_score_does_not_depend_on_its_batch(estimator, evidence, language_model: LanguageModel) -> None:
    alone = language_model.generate(QUESTIONS[1], GenerationOptions(max_new_tokens=5)).evidence
    together, single = brief(estimator)(evidence[1]), brief(estimator)(alone)
    assert single.uncertainty == pytest.approx(together.uncertainty, rel=1e-5, abs=1e-9)
    assert single.details.keys() == {"scored_tokens", "scoring_ms"}


@pytest.mark.parametrize("estimator", ASKING)
def test_an_empty_answer_has_no_score(estimator, make_language_model) -> None:
    model = make_language_model()
    model._decoder._end_tokens = tuple(range(258))
    empty = model.generate("q", GenerationOptions(max_new_tokens=3)).evidence
    assert empty.response_ids == ()
    assert brief(estimator)(empty).uncertainty is None
    foreign = brief(estimator)(model.evidence("q", "An answer."))
    if estimator in (LengthNormalisedEntropy, Inside, SemanticEntropy, SemanticDensity, MutualInformation, SAR):
        assert (foreign.uncertainty, foreign.reason) == (None, "all samples are empty")
    else:
        assert foreign.uncertainty is not None


@pytest.mark.parametrize("estimator", [brief(estimator) for estimator in ASKING])
def test_a_guard_can_be_calibrated_for_it(estimator, language_model: LanguageModel, tmp_path) -> None:
    options = GenerationOptions(max_new_tokens=3)
    draft = Guard(language_model, estimator, Policy(threshold=0.0), options=options)
    score = draft("q").uncertainty
    made = calibrate([score] * 60, [True] * 60, alpha=0.1, delta=0.1, binding=draft.binding)
    made.save(tmp_path / "calibration.json")
    policy = Policy.from_calibration(Calibration.load(tmp_path / "calibration.json"))
    # 60 equal scores: the threshold is that score, give or take the last digits.
    assert Guard(language_model, estimator, policy, options=options)("q").status == "scored"
    with pytest.raises(BindingMismatchError):
        Guard(language_model, replace_setting(estimator), policy, options=options)("q")


def replace_setting(estimator):
    if isinstance(estimator, PTrue):
        return replace(estimator, normalised=not estimator.normalised)
    return replace(estimator, plan=replace(estimator.plan, max_new_tokens=2))


def test_questions_about_the_answer_must_fit(make_language_model) -> None:
    model = make_language_model(max_position_embeddings=64)
    rows = [generation.evidence for generation in model.generate_batch(["q"], GenerationOptions(max_new_tokens=5))]
    for estimator in (PTrue(), MutualInformation(Sampling(6, max_new_tokens=4))):
        score = estimator(rows[0])
        assert score.uncertainty is None
        assert "does not fit the context window" in score.reason


def test_the_suite_shares_samples_and_tells_its_settings(nli: Entailment, cross_encoder: CrossEncoder) -> None:
    suite = paper_suite(NLIEquivalence(nli), cross_encoder, 7, max_new_tokens=32)
    settings = {
        estimator.title: json.loads(json.dumps(estimator.settings()))
        for estimator in suite
        if hasattr(estimator, "title")
    }
    assert settings["Semantic Entropy"]["plan"] == settings["LN-PE"]["plan"]
    assert settings["Self-Con"]["plan"] == settings["Deg"]["plan"]
    assert settings["INSIDE"]["plan"] == {
        "count": 10, "temperature": 0.5, "top_p": 0.99, "top_k": 5, "seed": 7, "max_new_tokens": 32,
    }  # fmt: skip
    assert settings["Semantic Density"]["plan"] == {"count": 10, "penalty": 1.0, "max_new_tokens": 32}
    assert settings["Deg"]["equivalence"] == f"nli:{nli.name}"
    assert settings["SAR"]["similarity"] == cross_encoder.name
    assert len({estimator.name for estimator in ESTIMATORS}) == len(ESTIMATORS)
    # The defaults of each method alone are those of the suite.
    for estimator in paper_suite():
        assert estimator == type(estimator)()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Inside(alpha=0.0),
        lambda: SemanticDensity(temperature=0.0),
        lambda: SAR(t=0.0),
        lambda: MutualInformation(gamma1=-1.0),
        lambda: MutualInformation(f1=1.0),
    ],
)
def test_bad_settings(make) -> None:
    with pytest.raises(InputError):
        make()


@pytest.mark.parametrize("wording", ["plain", "paper"])
@pytest.mark.parametrize("context", [None, "A passage."])
def test_the_bare_question_is_what_is_compared_under(
    language_model: LanguageModel, wording: Wording, context: str | None
) -> None:
    turns = conversation("Who?", context, wording=wording, system="Be brief.")
    evidence = language_model.evidence(turns, "Nobody")
    assert evidence.question == "Who?"
    asked = "Who?" if context is None else "Context: A passage.\n\nQuestion: Who?"
    assert evidence.question_in_context == asked
    bare = [Message(turn.role, turn.content) for turn in turns]
    assert language_model.render(bare).ids == evidence.prompt.ids, "the model sees the content alone"
    as_it_stands = language_model.evidence(bare, "Nobody")
    assert as_it_stands.question == as_it_stands.question_in_context == turns[-1].content
    asked_plainly = language_model.evidence(asked, "Nobody")
    assert PTrue()(evidence).uncertainty == pytest.approx(PTrue()(asked_plainly).uncertainty, rel=1e-9)
