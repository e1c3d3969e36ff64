/** First messages: scripts for the demo model, and plain words for every other model. Each is [title, what, message]. */

export const SCRIPTS = [
  ["Say hello", "A short answer, streamed word by word", "Hello! What can you do?"],
  ["Use a tool", "A calculation; costs 0.1 credits", "/say Let me work that out.\n/call calculate {\"expression\": \"(17 + 4) * 12.5\"}\n/say It is **{result}**."],
  ["Ask for approval", "A chart for 12 credits: over the threshold", "/say I would like to draw this.\n/call draw_chart {\"title\": \"Runs per day\", \"series\": [3, 5, 4, 8, 13, 11, 17]}\n/say Here it is."],
  ["Take longer", "A job of ten seconds, without a worker", "/call long_job {\"seconds\": 10}\n/say {result}"],
  ["Use this browser", "A tool that this page executes", "/call browser_info {}\n/say {result}"],
  ["Ask me something", "The run waits for your answer", "/call ask_user {\"question\": \"Which colour shall it be?\", \"options\": [\"Blue\", \"Green\"]}\n/say {result} it is, then."],
];

export const EXAMPLES = [
  ["Say hello", "A short answer, streamed word by word", "Hello! What can you do? Answer in three short points."],
  ["Use a tool", "A calculation with the calculator", "Use the calculator: how much are 17 licences at 12.50 each, plus 19 % tax?"],
  ["Ask for approval", "A chart, which costs more than the threshold", "Draw a chart named “Runs per day” of 3, 5, 4, 8, 13, 11 and 17."],
  ["Use this browser", "A tool that this page executes", "Use browser_info: what time is it here?"],
  ["Ask me something", "The run waits for your answer", "Help me to choose a colour for my website. Ask me one question first, with a few options."],
];
