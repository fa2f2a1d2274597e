//! `balanced`: slots go round-robin over the expert-parallel ranks, and over the experts of each, so that no token has an expert
//! twice.
//!
//! With grouped top-k a token may use experts of only so many groups. It uses exactly that many, the next ones in a
//! rotation over the tokens, takes the same number of experts from each (what does not divide goes to the groups that had the
//! fewest so far), and goes round-robin within each group. The rotations over groups, and over the experts of a group, take
//! turns among the ranks.

use super::{Layout, Slice};

/// Grouped top-k.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Groups of equal size, one after the other.
    pub count: usize,
    /// Groups that a token uses.
    pub used: usize,
}

/// `[tokens * top_k]` experts of the slice, for every layer.
pub(super) fn experts(layout: &Layout, slice: Slice) -> Result<Vec<u32>, String> {
    let Layout { experts, top_k, ranks, .. } = *layout;
    let groups = layout.groups.unwrap_or(Groups { count: 1, used: 1 });
    check(layout, groups)?;
    let (per_rank, per_group) = (experts / ranks, experts / groups.count);
    // One of each rank, then the next one of each.
    let turns = |expert: usize| (expert % per_rank, expert / per_rank);
    let mut order: Vec<usize> = (0..groups.count).collect();
    order.sort_by_key(|group| turns(group * per_group));
    let members = |group: usize| {
        let mut members: Vec<usize> = (group * per_group..(group + 1) * per_group).collect();
        members.sort_by_key(|&expert| turns(expert));
        members
    };
    let members: Vec<Vec<usize>> = (0..groups.count).map(members).collect();
    let mut given = vec![0_usize; groups.count];
    let mut chosen = Vec::with_capacity(slice.tokens * top_k);
    for token in 0..slice.first + slice.tokens {
        let own: Vec<usize> =
            (0..groups.used).map(|i| order[(token * groups.used + i) % groups.count]).collect();
        let mut shares: Vec<(usize, usize)> = own.iter().map(|&group| (group, top_k / groups.used)).collect();
        let mut fewest: Vec<usize> = (0..groups.used).collect();
        fewest.sort_by_key(|&i| given[own[i]]);
        fewest[..top_k % groups.used].iter().for_each(|&i| shares[i].1 += 1);
        // In turns over the token's groups, as long as each has a share left.
        for turn in 0..top_k.div_ceil(groups.used) {
            for &(group, _) in shares.iter().filter(|(_, share)| turn < *share) {
                if token >= slice.first {
                    chosen.push(members[group][given[group] % per_group] as u32);
                }
                given[group] += 1;
            }
        }
    }
    Ok(chosen)
}

fn check(layout: &Layout, groups: Groups) -> Result<(), String> {
    let Layout { experts, top_k, ranks, .. } = *layout;
    let Groups { count, used } = groups;
    if ranks == 0 || !experts.is_multiple_of(ranks) {
        return Err(format!(
            "balanced routing needs the same number of experts on each rank: {experts} on {ranks}"
        ));
    }
    if count == 0 || !experts.is_multiple_of(count) {
        return Err(format!("{experts} experts do not divide into {count} groups"));
    }
    if !(1..=count).contains(&used) || top_k < used || top_k.div_ceil(used) > experts / count {
        let size = experts / count;
        return Err(format!(
            "{top_k} experts of a token do not spread over {used} of {count} groups of {size}"
        ));
    }
    Ok(())
}
