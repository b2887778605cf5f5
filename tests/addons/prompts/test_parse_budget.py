from rolltap.addons.prompts.rendering import ParseBudget


def test_parses_take_their_share_of_the_time():
    now = 0.0
    budget = ParseBudget(0.1, clock=lambda: now)
    spent = 0.0
    while now < 100:
        if budget.allows():
            spent += 0.01
            now += 0.01
            budget.spend(0.01)
        now += 0.001
    assert 8 < spent < 10.1


def test_a_long_parse_does_not_keep_the_others_waiting_for_long():
    now = 0.0
    budget = ParseBudget(0.1, clock=lambda: now)
    budget.spend(60)
    assert not budget.allows()
    now = 2.0
    assert budget.allows()
