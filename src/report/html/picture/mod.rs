//! Pictures as SVG by plotters: colours, axes, and the frame that all charts share.
//!
//! Colours are drawn as the constants below, which suit a light page; a style sheet maps each to a variable, so that a dark page
//! has its own. Everything is drawn at twice the size that it is shown at, because plotters rounds to whole pixels. Text is laid
//! out by the browser; plotters only estimates its width, which needs no font.

pub mod histogram;
pub mod kernels;
pub mod replays;
pub mod roofline;
pub mod skew;
pub mod trend;

use std::error::Error;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::LazyLock;

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::text;

/// A picture, or why there is none.
pub type Drawn = Result<String, String>;

/// What drawing a part comes to.
type Part = Result<(), Box<dyn Error>>;

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Pixels of the drawing for each that is shown.
const SCALE: i32 = 2;

/// A colour's variable, what it is on a light page (and drawn as), and on a dark one.
type Colour = (&'static str, RGBColor, &'static str);

const INK: Colour = ("ink", RGBColor(0x1F, 0x23, 0x28), "#e6e8ea");
const QUIET: Colour = ("quiet", RGBColor(0x5F, 0x67, 0x70), "#a2aab3");
const GRID: Colour = ("grid", RGBColor(0xE3, 0xE5, 0xE8), "#2d3239");
const NEW: Colour = ("new", RGBColor(0x2F, 0x5D, 0xA8), "#7ba9ea");
const OLD: Colour = ("old", RGBColor(0xB3, 0x69, 0x0F), "#dfa255");
const OTHER: Colour = ("other", RGBColor(0x9A, 0xA1, 0xA9), "#737c86");

/// Kernels, the longest first.
const KERNELS: [Colour; 8] = [
    ("k0", RGBColor(0x3B, 0x6F, 0xB6), "#7aa7e8"),
    ("k1", RGBColor(0xD9, 0x82, 0x2B), "#e8a257"),
    ("k2", RGBColor(0x3E, 0x96, 0x51), "#6fc283"),
    ("k3", RGBColor(0xC0, 0x50, 0x4D), "#e58783"),
    ("k4", RGBColor(0x7B, 0x5E, 0xA7), "#b298db"),
    ("k5", RGBColor(0x8C, 0x6D, 0x46), "#c2a274"),
    ("k6", RGBColor(0xC0, 0x5A, 0x9A), "#e295c4"),
    ("k7", RGBColor(0x3F, 0x8F, 0x9B), "#7ccbd6"),
];

/// The style sheet that gives the colours of pictures their meaning on light and dark pages.
pub fn style() -> &'static str {
    static STYLE: LazyLock<String> = LazyLock::new(|| {
        let colours = [INK, QUIET, GRID, NEW, OLD, OTHER].into_iter().chain(KERNELS);
        let (mut light, mut dark, mut rules) = (String::new(), String::new(), String::new());
        for (name, colour, on_dark) in colours {
            let hex = hex(colour);
            // Writing to a string cannot fail.
            let _ = write!(light, "--p-{name}:{hex};");
            let _ = write!(dark, "--p-{name}:{on_dark};");
            let _ = write!(rules, "svg [fill=\"{hex}\"]{{fill:var(--p-{name})}}");
            let _ = write!(rules, "svg [stroke=\"{hex}\"]{{stroke:var(--p-{name})}}");
        }
        format!(":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{rules}")
    });
    &STYLE
}

/// As plotters writes it.
fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// The variable of the colour of a kernel by its rank among them; beyond the palette, that of all others.
pub fn kernel_variable(at: Option<usize>) -> String {
    let (name, ..) = at.and_then(|at| KERNELS.get(at)).unwrap_or(&OTHER);
    format!("var(--p-{name})")
}

/// How many kernels have a colour of their own.
pub const KERNEL_COLOURS: usize = KERNELS.len();

fn font(colour: Colour) -> TextStyle<'static> {
    // plotters divides sizes by 1.24: this is 12 px as shown.
    ("sans-serif", 12.0 * 1.24 * f64::from(SCALE)).into_font().color(&colour.1)
}

fn line(colour: Colour, width: u32) -> ShapeStyle {
    colour.1.stroke_width(width * SCALE.unsigned_abs())
}

/// A picture of this width and height, as shown.
fn draw(size: (u32, u32), part: impl FnOnce(&Area<'_>) -> Part) -> Drawn {
    let mut svg = String::new();
    let scale = SCALE.unsigned_abs();
    {
        let root = SVGBackend::with_string(&mut svg, (size.0 * scale, size.1 * scale)).into_drawing_area();
        part(&root).map_err(|error| error.to_string())?;
        root.present().map_err(|error| error.to_string())?;
    }
    Ok(svg)
}

/// The range of finite values with a margin; where they are all alike, around them.
fn range(values: impl IntoIterator<Item = f64>) -> Range<f64> {
    let finite = values.into_iter().filter(|value| value.is_finite());
    let (low, high) =
        finite.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
    if low > high {
        return 0.0..1.0;
    }
    // Less than this could not be told apart on an axis.
    let margin = ((high - low) * 0.06).max(high.abs().max(low.abs()) * 2e-4).max(1e-9);
    low - margin..high + margin
}

/// Round numbers within a range, about as many as wanted: steps of 1, 2 or 5 times a power of ten.
fn ticks(range: &Range<f64>, wanted: f64) -> Vec<f64> {
    let rough = (range.end - range.start) / wanted;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let first = (range.start / step).ceil();
    let count = ((range.end / step).floor() - first).clamp(0.0, 100.0) as u32;
    (0..=count).map(|at| (first + f64::from(at)) * step).collect()
}

/// A number at a tick, with the decimals that tell it from the next one.
fn at_tick(value: f64, ticks: &[f64]) -> String {
    text::with_step(value, ticks.windows(2).next().map_or(1.0, |pair| pair[1] - pair[0]))
}

/// How a chart's axis is marked.
struct Marks<'a> {
    range: Range<f64>,
    ticks: Vec<f64>,
    label: &'a dyn Fn(&f64) -> String,
}

/// An empty chart with its axes; `title` names what goes up, with the unit, and `along` what goes to the right.
fn chart<'a>(
    area: &Area<'a>,
    (title, along): (&str, &str),
    x: Marks<'_>,
    y: Marks<'_>,
) -> Result<Chart<'a>, Box<dyn Error>> {
    area.draw(&Text::new(title.to_owned(), (0, 0), font(INK)))?;
    let mut chart = ChartBuilder::on(area)
        .margin_top(24 * SCALE)
        .margin_right(22 * SCALE)
        .x_label_area_size(if along.is_empty() { 20 * SCALE } else { 36 * SCALE })
        .y_label_area_size(58 * SCALE)
        .build_cartesian_2d(x.range.clone(), y.range.clone())?;
    // The texts of plotters' own axes are placed by widths that it can only guess; these are anchored.
    let (left, below) = (Pos::new(HPos::Right, VPos::Center), Pos::new(HPos::Center, VPos::Top));
    for at in &x.ticks {
        chart
            .draw_series([PathElement::new(vec![(*at, y.range.start), (*at, y.range.end)], line(GRID, 1))])?;
        let label = Text::new((x.label)(at), (0, 6 * SCALE), font(QUIET).pos(below));
        chart.draw_series([EmptyElement::at((*at, y.range.start)) + label])?;
    }
    for at in &y.ticks {
        chart
            .draw_series([PathElement::new(vec![(x.range.start, *at), (x.range.end, *at)], line(GRID, 1))])?;
        let label = Text::new((y.label)(at), (-7 * SCALE, 0), font(QUIET).pos(left));
        chart.draw_series([EmptyElement::at((x.range.start, *at)) + label])?;
    }
    let name =
        Text::new(along.to_owned(), (0, 21 * SCALE), font(QUIET).pos(Pos::new(HPos::Right, VPos::Top)));
    chart.draw_series([EmptyElement::at((x.range.end, y.range.start)) + name])?;
    Ok(chart)
}
