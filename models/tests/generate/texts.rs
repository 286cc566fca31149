//! Texts by the library, on any number of ranks.

use super::*;

fn go(_: Event<'_>) -> ControlFlow<EndOf> {
    ControlFlow::Continue(())
}

/// Requests are dealt to the ranks in turn, so that of four ranks some end long before others.
#[test]
fn tokens_equal_whole_forwards_at_any_number_of_ranks() {
    let requests = requests();
    let alone = load(EpGroup::single(GroupConfig::new(8, 64)).expect("a group"));
    let expected: Vec<_> = requests.iter().map(|request| expected(&alone, request)).collect();
    for (ranks, spread, prefill) in [(1, 0, 64), (1, 32, 64), (2, 32, 64), (4, 0, 64), (1, 0, 4), (2, 32, 3)] {
        let worlds = || ThreadWorld::create(ranks, Duration::from_secs(60));
        let outputs: Vec<Vec<Vec<u32>>> = thread::scope(|scope| {
            let threads: Vec<_> = worlds()
                .into_iter()
                .zip(worlds())
                .enumerate()
                .map(|(rank, (experts, steps))| {
                    let requests = &requests;
                    scope.spawn(move || {
                        let config = GroupConfig::new(8, 64);
                        let group = Group::new(Cpu::new(), Box::new(experts), config).expect("a group");
                        let decoder = OverRanks::new(load(EpGroup::new(group)), Box::new(steps));
                        let generator = Generator::new(decoder, None).expect("a generator");
                        let generator = generator.spread(spread).prefill_tokens(prefill);
                        let own: Vec<Request> = requests.iter().skip(rank).step_by(ranks).cloned().collect();
                        let (outputs, _) = generator.run(&own, go).expect("outputs");
                        outputs.into_iter().map(|output| output.tokens).collect()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("a rank")).collect()
        });
        for (i, expected) in expected.iter().enumerate() {
            assert_eq!(
                &outputs[i % ranks][i / ranks],
                expected,
                "request {i} over {ranks} ranks, spread {spread}, pieces of {prefill}"
            );
        }
    }
}

#[test]
fn a_context_that_is_full_ends_a_text() {
    let model = load(EpGroup::single(GroupConfig::new(8, 256)).expect("a group"));
    let generator = Generator::new(&model, None).expect("a generator");
    let (outputs, _) = generator.run(&[Request::new(vec![1; 250], 100)], go).expect("outputs");
    assert_eq!(outputs[0].tokens.len(), 7, "256 positions, and one token that takes none");
    let message = generator.run(&[Request::new(vec![1; 256], 1)], go).expect_err("refused").to_string();
    assert!(message.contains("256 tokens, the decoder's context 256"), "{message}");
}

/// A program that loads the model says whether links are followed.
#[cfg(unix)]
#[test]
fn a_model_is_loaded_through_links_where_asked() {
    let real = chat_folder(&tokenizer_json(false));
    let snapshot = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::os::unix::fs::symlink(real.path().join(name), snapshot.path().join(name)).expect("a link");
    }
    let load = |options| Model::load(snapshot.path(), &Device::Cpu, options);
    let message = load(LoadOptions::default()).expect_err("links").to_string();
    assert!(message.contains("outside the folder") && message.contains("OpenOptions::follow_links"), "{message}");
    let follow = LoadOptions { follow_links: true, ..LoadOptions::default() };
    load(follow).expect("a model");
    load(LoadOptions { random: Some(1), ..LoadOptions::default() }).expect_err("links");
    load(LoadOptions { random: Some(1), ..follow }).expect("a random model");
}

/// Blocks of 64x64 with the scales of those of 128x128 that they are parts of: the same values in a form that is not
/// kept.
#[test]
fn experts_in_a_form_that_is_not_kept_are_dequantized() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/deepseek_v3_fp8");
    let dir = tempfile::tempdir().expect("a folder");
    let config = std::fs::read_to_string(golden.join("config.json")).expect("a file");
    let mut config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    config["quantization_config"]["weight_block_size"] = serde_json::json!([64, 64]);
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("a file");
    let weights = std::fs::read(golden.join("model.safetensors")).expect("a file");
    std::fs::write(dir.path().join("model.safetensors"), with_smaller_blocks(&weights)).expect("a file");
    let ids = Tensor::new(&[[3u32, 14, 15, 92, 6]], &Device::Cpu).expect("ids");
    let logits = |folder: &Path, experts| {
        let model =
            Model::load(folder, &Device::Cpu, LoadOptions { experts, ..LoadOptions::default() }).expect("a model");
        let logits = model.forward(&ids).expect("logits").flatten_all().expect("flat");
        let logits = logits.to_dtype(candle_core::DType::F32).expect("f32").to_vec1::<f32>().expect("values");
        (logits, model.dequantized_experts().to_vec())
    };
    let (expected, none) = logits(&golden, ExpertWeights::Dequantized);
    assert!(none.is_empty());
    assert!(logits(&golden, ExpertWeights::AsStored).1.is_empty(), "blocks of 128x128 are kept");
    let (found, dequantized) = logits(dir.path(), ExpertWeights::AsStored);
    assert_eq!((found, dequantized), (expected, vec![(1, Form::Fp8Block)]));
    let done = run(dir.path(), &["--prompt-ids", "3,14,15", "--max-tokens", "4"]);
    let report = String::from_utf8(done.stderr.clone()).expect("UTF-8");
    assert_eq!(
        report.matches("no product reads the form they are stored in (Fp8Block); de-quantized").count(),
        1,
        "{report}"
    );
    assert_eq!(text(&done).split_whitespace().count(), 4);
}

/// A safetensors file in which every scale of a block of 128x128 is that of four of 64x64.
fn with_smaller_blocks(file: &[u8]) -> Vec<u8> {
    let header = u64::from_le_bytes(file[..8].try_into().expect("a length")) as usize;
    let (header, data) = file[8..].split_at(header);
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).expect("JSON");
    let number = |value: &serde_json::Value| value.as_u64().expect("a number") as usize;
    let (mut out, mut entries) = (Vec::new(), serde_json::Map::new());
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let bytes = &data[number(&entry["data_offsets"][0])..number(&entry["data_offsets"][1])];
        let (mut entry, start) = (entry.clone(), out.len());
        match name.strip_suffix("_scale_inv").map(|weight| header[weight]["shape"].clone()) {
            None => out.extend_from_slice(bytes),
            Some(shape) => {
                let [rows, columns] = [0, 1].map(|d| number(&shape[d]).div_ceil(64));
                let wide = number(&entry["shape"][1]);
                let scales = (0..rows * columns).map(|n| (n / columns / 2) * wide + n % columns / 2);
                scales.for_each(|at| out.extend_from_slice(&bytes[4 * at..4 * at + 4]));
                entry["shape"] = serde_json::json!([rows, columns]);
            }
        }
        entry["data_offsets"] = serde_json::json!([start, out.len()]);
        entries.insert(name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(entries).to_string();
    header.push_str(&" ".repeat((8 - header.len() % 8) % 8));
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &out].concat()
}
