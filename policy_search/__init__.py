"""From samples to a policy: line fitting, the papers' Algorithm 1, and the exact optimum of the closed form."""
