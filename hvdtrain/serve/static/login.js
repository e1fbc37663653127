// Shows errors without reloading the page. The form also works without this script.
const form = document.querySelector("form");
const wrong = document.getElementById("wrong");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  wrong.textContent = "";
  try {
    const body = new URLSearchParams(new FormData(form));
    const response = await fetch("/login", { method: "POST", body });
    if (response.ok && response.redirected) location.assign(`/${location.hash}`);
    else {
      wrong.textContent = response.status === 403 ? "Wrong token." : "The request was refused.";
      form.token.select();
    }
  } catch {
    wrong.textContent = "hvdtrain serve does not answer.";
  }
});
