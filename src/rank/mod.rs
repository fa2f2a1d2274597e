//! Ranks: one process each, who started them, and what they tell each other between replays.
