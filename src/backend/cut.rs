//! The part of a weight that a rank holds: some of its rows and some of its columns.

use std::ops::Range;

/// Some rows and some columns of a weight; what is kept is their cross product, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// Rows and columns of the whole weight.
    pub full: (usize, usize),
    /// The rows that are kept, ascending.
    pub rows: Vec<Range<usize>>,
    /// The columns that are kept, ascending.
    pub cols: Vec<Range<usize>>,
}

/// A rectangle that is contiguous in rows and in columns, in the whole weight and in the part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Its rows and columns.
    pub size: (usize, usize),
    /// Its first row and column in the whole weight.
    pub full: (usize, usize),
    /// Its first row and column in the part.
    pub part: (usize, usize),
}

/// The ranges with neighbours joined and empty ones left out.
pub(super) fn joined(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range.clone()),
        }
    }
    joined
}

/// Ranges, each with its place when they lie one after the other.
fn placed(ranges: &[Range<usize>]) -> impl Iterator<Item = (usize, &Range<usize>)> {
    ranges.iter().scan(0, |next, range| {
        let first = *next;
        *next += range.len();
        Some((first, range))
    })
}

impl Cut {
    /// All of a weight.
    pub(super) fn whole(rows: usize, cols: usize) -> Self {
        let all = |size: usize| joined(std::slice::from_ref(&(0..size)));
        Self { full: (rows, cols), rows: all(rows), cols: all(cols) }
    }

    /// The rectangles that make up the part.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        placed(&self.rows).flat_map(move |(row, rows)| {
            placed(&self.cols).map(move |(col, cols)| Block {
                size: (rows.len(), cols.len()),
                full: (rows.start, cols.start),
                part: (row, col),
            })
        })
    }

    /// The elements of the whole weight (by row-major index) that make up the part, in its order, in the longest possible runs.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let width = self.full.1;
        // Rows of which all columns are kept lie one after the other.
        let whole = self.cols.len() == 1 && self.cols[0] == (0..width);
        let steps = move |rows: &Range<usize>| if whole { rows.len().max(1) } else { 1 };
        self.rows.iter().flat_map(move |rows| {
            let step = steps(rows);
            rows.clone().step_by(step).flat_map(move |row| {
                self.cols.iter().map(move |cols| {
                    let first = row * width + cols.start;
                    first..first + (step - 1) * width + cols.len()
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{WeightRole, WeightSpec};

    fn spec(rows: usize, cols: usize) -> WeightSpec {
        let (name, role) = ("w".to_owned(), WeightRole::Linear);
        WeightSpec { name, parts: Vec::new(), rows, cols, role, cut: None }
    }

    #[test]
    fn runs_are_the_parts_elements_in_order() {
        let mut w = spec(6, 5);
        w.cut_rows(&[1..2, 2..3, 5..6]);
        let runs = |w: &WeightSpec| w.cut.as_ref().unwrap().runs().collect::<Vec<_>>();
        assert_eq!((w.rows, w.cols, w.first_row(), w.full()), (3, 5, 1, (6, 5)));
        assert_eq!(runs(&w), [5..15, 25..30]);
        w.cut_cols(&[0..1, 3..5]);
        assert_eq!((w.rows, w.cols), (3, 3));
        assert_eq!(runs(&w), [5..6, 8..10, 10..11, 13..15, 25..26, 28..30]);
    }

    #[test]
    fn blocks_cover_the_part() {
        let mut w = spec(6, 5);
        w.cut_rows(&[1..3, 5..6]);
        w.cut_cols(&[0..1, 3..5]);
        let blocks: Vec<Block> = w.cut.as_ref().unwrap().blocks().collect();
        let places: Vec<_> = blocks.iter().map(|block| (block.size, block.full, block.part)).collect();
        assert_eq!(
            places,
            [
                ((2, 1), (1, 0), (0, 0)),
                ((2, 2), (1, 3), (0, 1)),
                ((1, 1), (5, 0), (2, 0)),
                ((1, 2), (5, 3), (2, 1))
            ]
        );
    }

    #[test]
    fn all_of_a_weight_is_no_cut() {
        let mut w = spec(6, 5);
        w.cut_rows(&[0..2, 2..6]);
        w.cut_cols(&[0..1, 1..5]);
        assert_eq!(w, spec(6, 5));
    }
}
