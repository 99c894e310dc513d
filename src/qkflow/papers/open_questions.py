"""Questions that this project has not settled: the recipe that would settle each, and its cost."""

from __future__ import annotations

from qkflow.papers.claims import Results
from qkflow.papers.costs import StudyCost
from qkflow.papers.recipe import load_recipe, recipe_names

OPEN_QUESTION = "open question: "  # of the claim of such a recipe


def open_question_rows(results: Results) -> list[dict[str, str]]:
    """Return one row per recipe of an open question. Nothing is read from the stored results."""
    recipes = [
        recipe for name in recipe_names() if (recipe := load_recipe(name)).claim.startswith(OPEN_QUESTION)
    ]
    return [
        {
            "recipe": recipe.name,
            "question": recipe.claim.removeprefix(OPEN_QUESTION),
            "what would settle it": str(StudyCost(recipe.name)),
        }
        for recipe in recipes
    ]
